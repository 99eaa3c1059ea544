"""What runs inside an image: rows, data, training, measurement. Import from the submodules."""
