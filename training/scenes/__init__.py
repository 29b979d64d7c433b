"""The closed world of kestrel-tiny: shapes, scenes and their drawing."""
