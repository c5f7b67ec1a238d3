"""Sealed caches: a data set that outgrows a folder of small files, in a mapped table and large files."""
