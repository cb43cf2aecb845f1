"""The steps of RunInference: Prepare gathers elements into blocks, Infer runs them through a model host, Results
turns blocks back into elements.
"""
