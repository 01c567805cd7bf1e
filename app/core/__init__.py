"""The heart: the rules of read holds, retention policies and safe drops, as a pure state machine.

No Spark, no clock, no files, no threads: time and everything seen outside comes in as an argument, every step returns
what changed. Nothing in here imports anything else of `app`.
"""
