"""What a device's own compiler makes of a model and a method, on a machine that has no such device."""
