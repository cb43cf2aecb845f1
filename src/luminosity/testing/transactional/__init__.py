"""A Kafka broker in Python for tests that need transactions."""
