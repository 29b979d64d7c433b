"""The command ``cluster``, and the process of a server of a cluster."""
