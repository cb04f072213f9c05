#include "ops/core/row/spec.h"

#include <gtest/gtest.h>

#include <string>

#include "ops/core/testing.h"

namespace het_tf {
namespace {

Status ParseOnly(const std::string& text) {
  Spec spec;
  return Spec::Parse("optimizer", text, &spec);
}

TEST(SpecTest, TakesWhatIsGivenAndDefaultsForTheRest) {
  Spec spec;
  ASSERT_OK(Spec::Parse("optimizer", "  adam beta_1=0.5   epsilon=-1e-3 ", &spec));
  EXPECT_EQ(spec.name(), "adam");
  EXPECT_EQ(spec.Take("beta_1", 0.9), 0.5);
  EXPECT_EQ(spec.Take("epsilon", 1), -1e-3);
  EXPECT_EQ(spec.Take("beta_2", 0.999), 0.999);
  EXPECT_OK(spec.Finish());
}

TEST(SpecTest, ParsingAgainForgetsWhatWasThere) {
  Spec spec;
  ASSERT_OK(Spec::Parse("optimizer", "adam beta_1=0.5", &spec));
  ASSERT_OK(Spec::Parse("initializer", "zeros", &spec));
  EXPECT_EQ(spec.name(), "zeros");
  EXPECT_OK(spec.Finish());
}

TEST(SpecTest, ErrorsNameTheArgumentTheTextAndTheWord) {
  EXPECT_REFUSED(ParseOnly(""), "optimizer is empty");
  EXPECT_REFUSED(ParseOnly("  "), "optimizer is empty");
  EXPECT_REFUSED(ParseOnly("sgd fast"), "optimizer = 'sgd fast': 'fast' is not of the form");
  EXPECT_REFUSED(ParseOnly("sgd =1"), "'=1' is not of the form");
  EXPECT_REFUSED(ParseOnly("sgd a=1 a=1"), "'a' is given twice");
  for (const std::string number : {"", "x", "1x", "1,5", "nan", "inf", "-inf", "1e999"}) {
    EXPECT_REFUSED(ParseOnly("sgd a=" + number), "'a=" + number + "' does not give a finite");
  }
}

TEST(SpecTest, LeftOverParameterIsNamed) {
  Spec spec;
  ASSERT_OK(Spec::Parse("optimizer", "sgd learning_rate=1", &spec));
  EXPECT_REFUSED(spec.Finish(), "there is no parameter 'learning_rate'");
}

}  // namespace
}  // namespace het_tf
