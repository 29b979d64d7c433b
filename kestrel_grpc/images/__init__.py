"""Images that the server stores for later requests: how they arrive, who owns them, how they are found."""
