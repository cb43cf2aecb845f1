"""Pipelines for Dataflow: describe one as a job, check the job without a network, and write its container image.

``job`` builds what Beam's ``DataflowRunner`` would send, ``steps`` reads what each step asks for, and ``check`` says
what would go wrong there. ``image_recipe`` writes the container's recipe.
"""
