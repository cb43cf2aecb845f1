"""Consumers, offsets, watermarks and formats: what the step behind ReadKafka is made of."""
