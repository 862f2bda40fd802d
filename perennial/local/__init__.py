"""The one-machine stack: everything the loop needs, on loopback, without root or containers."""
