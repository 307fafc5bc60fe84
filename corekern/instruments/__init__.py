"""What FP8 KV costs, measured on one's own data; each module is a command and a function of the same name."""
