"""Thin modules for the training engines that people use; none imports its engine before it is used."""
