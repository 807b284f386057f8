mod house;
mod paths;
