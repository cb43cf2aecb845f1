"""The same with sentence-transformers alone."""

import sys

from sentence_transformers import SentenceTransformer

texts = ["a slow film", "wonderful landscapes"]
for text, vector in zip(texts, SentenceTransformer(sys.argv[1], device="cpu").encode(texts), strict=True):
    print(text, vector[:3])
