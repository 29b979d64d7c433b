"""Commands about models' files, and about the models that a server has."""
