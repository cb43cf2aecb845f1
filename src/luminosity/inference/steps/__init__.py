"""The steps of RunInference: Prepare gathers rows into blocks, Infer asks the host, Results gives rows back."""
