"""From a pipeline's proto to the stages, buffers and codecs that the loop runs."""
