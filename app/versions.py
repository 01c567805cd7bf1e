"""What of the Java side belongs together, in one place. The Python side is pinned in setup.cfg.

The connector's version rules the rest: `spark-token-provider-kafka-0-10`, which every Kafka connector needs, could be
had in version 4.0.0 only, so Spark is 4.0.x, and Delta is the newest whose jar has a build for Spark 4.0.
"""

SCALA = "2.13"
SPARK_CONNECTOR = "4.0.0"
DELTA = "4.4.0"
KAFKA = "4.1.1"

# What Spark loads beside its own jars.
SPARK_PACKAGES = (
    f"io.delta:delta-spark_4.0_{SCALA}:{DELTA}",
    f"org.apache.spark:spark-sql-kafka-0-10_{SCALA}:{SPARK_CONNECTOR}",
)

# The embedded broker, and what makes its log visible: without a binding for slf4j, Kafka would fail without a word.
KAFKA_BROKER = f"org.apache.kafka:kafka_{SCALA}:{KAFKA}"
BROKER_PACKAGES = (KAFKA_BROKER, "org.apache.logging.log4j:log4j-slf4j-impl:2.24.3")

# Spark 4.0 needs 17; from 24 on, the security manager that its Hadoop libraries ask for is gone.
JAVA_OLDEST = 17
JAVA_NEWEST = 23
