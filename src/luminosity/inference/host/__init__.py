"""The model host: the single point of contact between a process and a device."""
