"""Memory: which pages, prefixes, images and crops the device holds. Ids and keys only, no tensor."""
