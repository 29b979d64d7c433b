"""What both kinds of clients share: requests, streams, frames and ``map``."""
