"""Tables from files and into files and vector stores. Knows nothing of the engine, nor of models."""
