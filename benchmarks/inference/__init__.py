"""Our inference engine against its peers and the limits of the machine."""
