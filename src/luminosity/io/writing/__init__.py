"""The steps of ``WriteTable``: workers write temporary files, and a last step gives them their final names."""
