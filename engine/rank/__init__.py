"""One rank: its device, its processes, joining a launch, and failure handling."""
