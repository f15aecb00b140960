"""What the operating system offers: processes, memory, kernel locks. Imports the standard library only."""
