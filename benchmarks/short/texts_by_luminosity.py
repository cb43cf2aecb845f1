"""The README's two texts into vectors: ``lum run texts_by_luminosity.py MODEL``."""

import sys

import apache_beam as beam

from luminosity import RunInference, SentenceEmbedder

embedder = SentenceEmbedder(sys.argv[1])
with beam.Pipeline() as pipeline:
    texts = pipeline | beam.Create(["a slow film", "wonderful landscapes"])
    texts | RunInference(embedder) | beam.Map(lambda result: print(result.example, result.inference[:3]))
