"""Images and text on their way in: decode, tile, tokenise. Knows no scheduler, skill, runtime or torch."""
