"""What keeps checkpoints sound: comparing them with their checksums, and keeping earlier states."""
