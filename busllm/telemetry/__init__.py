"""What a stage tells about itself: log lines and trace events. Knows no bus: events go to a sink that it is given."""
