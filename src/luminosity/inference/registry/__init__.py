"""Model registries: names such as ``models:/sentiment@champion``, and the versions that they stand for."""
