"""Describes a pipeline as a job of Dataflow, without a network and without credentials, and checks the description.

``capture`` builds what Beam's ``DataflowRunner`` would send, ``job`` the message that creates the job, ``steps`` reads
what each step asks for, and the modules of checks say what would go wrong there.
"""
