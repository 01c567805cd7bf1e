"""On which stores Delta's commits are safe with several writers."""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from pyspark.sql import SparkSession

from app.shards.errors import UnsafeShard
from app.state.store import local_path

_S3: Final = frozenset({"s3", "s3a", "s3n"})


def check_store(spark: SparkSession, location: str) -> None:
    """UnsafeShard where two drivers could both commit the same version, and nothing of ours can prevent it."""
    scheme = "file" if local_path(location) is not None else urlsplit(location).scheme
    if scheme not in _S3:
        return
    setting = f"spark.delta.logStore.{scheme}.impl"
    store = spark.conf.get(setting, None) or spark.sparkContext.getConf().get(setting, "")
    if not store or "SingleDriver" in store:
        raise UnsafeShard(
            f"{location} is on S3, where Delta's commits are only safe within one Spark driver unless a multi-driver "
            f"log store is configured: set {setting}, e.g. to io.delta.storage.S3DynamoDBLogStore."
        )
