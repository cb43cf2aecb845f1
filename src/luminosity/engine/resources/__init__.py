"""Resources: what steps ask for, what the machine has, and the worker pools made from both."""
