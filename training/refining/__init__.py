"""The segmentation refiner of kestrel-tiny: its samples, its training and its score."""
