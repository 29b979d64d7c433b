"""Models in buckets that speak S3: their addresses, the bucket, uploads, and the cache of a node."""
