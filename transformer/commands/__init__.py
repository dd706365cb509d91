"""One file per command: its flags and the few lines that call the library. Heavy imports wait until it runs."""
