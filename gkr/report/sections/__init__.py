"""The parts of the page, in reading order.

Each a function from the record to markup, pure but for the sample files it shows.
"""
