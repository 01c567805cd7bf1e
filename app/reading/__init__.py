"""What a read consists of; users have `app.reader`.

catalog    where a collection's data is, from the state tables
guard      the holds under which is read
planning   one version of the shard's table, late enough and not too late
frames     the updates of that version as a DataFrame, summed or not
running    a read under way, as an iterator
arrow      the same as Arrow batches, in bounded memory
stats      numbers from the log
subscription   a snapshot, and then what comes after it
"""
