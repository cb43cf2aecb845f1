"""Read records from Kafka, and write them to it, without Java."""
