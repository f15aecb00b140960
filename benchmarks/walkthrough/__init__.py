"""`make walkthrough`: every command line of the documents that the project began with, run, and what it printed."""
