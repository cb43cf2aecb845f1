"""Planning: turn a pipeline's proto into stages, buffers and codecs for the loop."""
