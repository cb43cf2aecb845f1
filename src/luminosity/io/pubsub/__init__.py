"""Messages of Pub/Sub: the steps behind Beam's ``ReadFromPubSub`` and ``WriteToPubSub``."""
