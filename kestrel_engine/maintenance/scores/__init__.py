"""How well scores say which results are right: labelled images, judged results, and curves that are fitted to them."""
