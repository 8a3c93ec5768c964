"""What an iteration is made of in every kind of job, and the loop over the iterations of a program."""
