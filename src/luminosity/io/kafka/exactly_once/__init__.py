"""How ``WriteKafka`` writes each record once: batches with numbers, and transactions that tell the next number."""
