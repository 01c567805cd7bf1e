"""Two JVMs on one shard: one winner each time, and a lock that ends with whoever held it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from app.shards.errors import LockTimeout
from app.shards.updates import Updates
from tests.spark.helpers import content, new_shard
from tests.spark.racer import race

ROUNDS = 8


def test_two_processes_race_and_a_killed_one_leaves_no_lock(spark: SparkSession, tmp_path: Path) -> None:
    shard = new_shard(spark, tmp_path)
    location, table_id = shard.table.location, shard.table.table_id
    command = [sys.executable, "-m", "tests.spark.racer", location, table_id, str(ROUNDS), str(tmp_path / "logs")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        try:
            assert other.stdout.readline() == "ready\n"
            print("go", file=other.stdin, flush=True)

            def meet(upper: int) -> None:
                assert other.stdin is not None
                assert other.stdout is not None
                assert other.stdout.readline() == f"{upper}\n"
                print("go", file=other.stdin, flush=True)

            ours = race(spark, shard, "ours", ROUNDS, meet=meet)
            theirs = {int(time): upper for time, upper in json.loads(other.stdout.readline()).items()}
            for time in range(ROUNDS):
                # One has won, and the other one, which was as far, is told by what.
                assert {ours[time], theirs[time]} == {None, time + 1}
            expected = {("ours" if ours[time] is None else "other", time): 1 for time in range(ROUNDS)}
            assert content(spark, shard) == expected

            print("lock", file=other.stdin, flush=True)
            assert other.stdout.readline() == "locked\n"
            with pytest.raises(LockTimeout):
                Updates(spark, location, table_id, lock_timeout_s=0.2).advance_upper(ROUNDS, ROUNDS + 1)
        finally:
            other.kill()
        assert shard.advance_upper(ROUNDS, ROUNDS + 1).upper == ROUNDS + 1
