"""The models as plain torch: layers, attention, vision tower, text decoder, region heads, refiner."""
