"""What is printed, drawn or exported for people. In: records and outcomes. Out: text and pages."""
