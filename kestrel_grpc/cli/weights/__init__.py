"""Commands about the files of models, and about the models of a server."""
