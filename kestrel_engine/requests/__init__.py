"""What a request passes before its submission: a place, checks, its images, its constraint, its adapter."""
