"""What kestrel-small learns from. A domain draws a picture and what may be asked about it."""
