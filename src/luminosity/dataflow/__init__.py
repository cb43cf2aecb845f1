"""Pipelines for Dataflow: describe one as a job, check the job without a network, and write its container image.

``capture`` builds what Beam's ``DataflowRunner`` would send, ``job`` the message that creates the job, ``steps`` reads
what each step asks for, and ``checks`` says what would go wrong there. ``image_recipe`` writes the container's recipe.
"""
